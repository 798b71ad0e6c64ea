source build/gpu/vllm/setup.sh
export PYTHONPATH=$PWD/build/gpu/site:$PYTHONPATH PYTHONUNBUFFERED=1
python3 -c "import vllm,allnorm;print(vllm.__version__,allnorm.__file__)"
date +%T
timeout 500 python3 benchmarks/engines/vllm_latency.py --model build/gpu/vllm/models/llama-3.1-8b --tp 2 --arms default,allnorm --repeats 5 --json $OUT/vllm.jsonl > $OUT/vllm.log 2>&1; echo rc $?
date +%T; grep -v INFO $OUT/vllm.log | tail -40 | cut -c1-220
