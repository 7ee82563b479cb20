# The benchmark runs end to end, and its contestants agree on the losses. Times are not judged.
add_test(NAME Bench.zero3_trains_like_the_unsharded_step
  COMMAND shardproof_command bench --model tiny --steps 2 --warmup 1 --rounds 1)
add_test(NAME Bench.pytorch_trains_like_the_unsharded_step
  COMMAND shardproof_command bench --model tiny --steps 2 --warmup 1 --rounds 1 --against ddp,fsdp2)
add_test(NAME Bench.contestants_agree_in_bfloat16
  COMMAND shardproof_command bench --model tiny --precision bf16 --steps 2 --warmup 1 --rounds 1 --against fsdp2)
add_test(NAME Bench.kernels_are_timed_on_the_cpu
  COMMAND shardproof_command bench kernels --device cpu --mib 1 --repeats 1 --rounds 1)
set_tests_properties(Bench.kernels_are_timed_on_the_cpu PROPERTIES LABELS device)
add_test(NAME Bench.an_unknown_contestant_is_refused COMMAND shardproof_command bench --against deepspeed)
set_tests_properties(Bench.an_unknown_contestant_is_refused PROPERTIES WILL_FAIL TRUE)
add_test(NAME Bench.checkpoints_load_to_the_loss_that_was_saved_beside_pytorch
  COMMAND shardproof_command bench checkpoint --model tiny --repeats 1 --rounds 1)
set_tests_properties(Bench.checkpoints_load_to_the_loss_that_was_saved_beside_pytorch PROPERTIES LABELS checkpoint)
set_tests_properties(Bench.zero3_trains_like_the_unsharded_step Bench.pytorch_trains_like_the_unsharded_step
  Bench.contestants_agree_in_bfloat16 Bench.an_unknown_contestant_is_refused PROPERTIES LABELS train)
