#!/usr/bin/env bash
# All figures of one GPU in one go: benchmarks/gpu.py with the python on PATH, no network, under eight minutes.
#
#   bash benchmarks/gpu.sh [--minutes 8] [--peak-tflops N] [--cpu-rehearsal]
#
# Where the repository has a folder `wheels`, the wheels in it are used in front of what the machine has, from a temporary
# folder, so that the machine's own packages stay as they are. Fill it beforehand, where there is a network:
#   pip download --only-binary :all: --no-deps -d wheels transformers==5.24.0 tokenizers huggingface-hub safetensors accelerate
# The table goes to standard error and one line of JSON to standard output; with OUT set, both also into that folder.
# Exit status 3: there is no GPU. --cpu-rehearsal runs every part on the CPU at a tiny size, to see that it works.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(command -v python || command -v python3) || { echo "There is no python on PATH." >&2; exit 2; }

case " $* " in
  *" --cpu-rehearsal "* | *" --help "* | *" -h "*) ;;
  *)
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
      echo "There is no GPU that torch can use here: nothing was measured. --cpu-rehearsal tries the script." >&2
      exit 3
    fi
    ;;
esac

if compgen -G "$root/wheels/*.whl" > /dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$root"/wheels/*.whl >&2
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$python" "$root/benchmarks/gpu.py" "$@"
