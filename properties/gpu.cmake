# The commands on GPUs, skipped with their own reason where there is none. `ctest -L cuda` runs them with the kernels of
# device.cmake; those with processes of NCCL are labelled nccl as well.
set(no_gpu "CUDA cannot be used here: no (GPU|driver)[.]" "this build has no CUDA kernels"
  "needs a GPU and its driver, and this machine shows none")
function(shardproof_gpu_test name gpus labels)
  add_test(NAME ${name} COMMAND shardproof_command ${ARGN})
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" PROCESSORS 2 RESOURCE_GROUPS "${gpus},gpus:1"
    SKIP_REGULAR_EXPRESSION "${no_gpu}")
endfunction()

foreach(mode exact ordered canonical fast)
  shardproof_gpu_test(Gpu.random_${mode}_cases_hold_on_rank_threads_of_one_gpu 1 cuda
    verify --device cuda --mode ${mode} --cases 40 --no-python --failures "${CMAKE_BINARY_DIR}/gpu_failures")
endforeach()
shardproof_gpu_test(Gpu.training_equals_the_golden_run_on_the_gpu 1 cuda
  train --device cuda --mesh dp_replicate=2,dp_shard=2 --strategy hsdp --steps 3 --check)
shardproof_gpu_test(Gpu.bench_trains_like_the_unsharded_step_and_pytorch 1 cuda
  bench --device cuda --ranks 1 --model tiny --steps 2 --warmup 1 --rounds 1 --against ddp,ddp_zero1,fsdp2,fsdp2_zero2)
foreach(ranks 1 2)
  shardproof_gpu_test(Nccl.random_cases_hold_on_${ranks}_gpu_ranks ${ranks} "nccl;gpu"
    verify --backend nccl --ranks ${ranks} --cases 20 --no-python --seed ${ranks} --failures "${CMAKE_BINARY_DIR}/gpu_failures")
  shardproof_gpu_test(Nccl.random_cases_hold_on_${ranks}_ranks_that_compute_on_gpus ${ranks} "cuda;nccl;gpu"
    verify --backend nccl --device cuda --ranks ${ranks} --cases 20 --no-python --seed ${ranks}
    --failures "${CMAKE_BINARY_DIR}/gpu_failures")
endforeach()
