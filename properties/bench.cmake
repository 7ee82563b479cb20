# The benchmark runs end to end, and its contestants agree on the losses. Times are not judged.
add_test(NAME Bench.zero3_trains_like_the_unsharded_step
  COMMAND shardproof_command bench --model tiny --steps 2 --warmup 1 --rounds 1)
add_test(NAME Bench.pytorch_trains_like_the_unsharded_step
  COMMAND shardproof_command bench --model tiny --steps 2 --warmup 1 --rounds 1 --against ddp,fsdp2)
add_test(NAME Bench.contestants_agree_in_bfloat16
  COMMAND shardproof_command bench --model tiny --precision bf16 --steps 2 --warmup 1 --rounds 1 --against fsdp2)
add_test(NAME Bench.says_what_part_of_a_step_the_check_of_replicas_takes
  COMMAND shardproof_command bench --model tiny --steps 2 --warmup 1 --rounds 1 --strategy ddp --against fingerprint)
set_tests_properties(Bench.says_what_part_of_a_step_the_check_of_replicas_takes PROPERTIES LABELS train
  PASS_REGULAR_EXPRESSION
  "the checks of --check=fingerprint take [0-9.]+% of the processor time" FAIL_REGULAR_EXPRESSION "TOO FAR")
add_test(NAME Bench.kernels_are_timed_on_the_cpu
  COMMAND shardproof_command bench kernels --device cpu --mib 1 --repeats 1 --rounds 1)
set_tests_properties(Bench.kernels_are_timed_on_the_cpu PROPERTIES LABELS device)
add_test(NAME Bench.an_unknown_contestant_is_refused COMMAND shardproof_command bench --against deepspeed)
set_tests_properties(Bench.an_unknown_contestant_is_refused PROPERTIES WILL_FAIL TRUE)
add_test(NAME Bench.checkpoints_load_to_the_loss_that_was_saved_beside_pytorch
  COMMAND shardproof_command bench checkpoint --model tiny --repeats 1 --rounds 1)
set_tests_properties(Bench.checkpoints_load_to_the_loss_that_was_saved_beside_pytorch PROPERTIES LABELS checkpoint)
# The same on meshes, beside DTensor and HSDP.
set(of_mesh bench --model tiny --steps 2 --warmup 1 --rounds 1)
add_test(NAME Bench.tensor_parallelism_trains_like_the_unsharded_step_and_dtensor
  COMMAND shardproof_command ${of_mesh} --mesh tp=2 --against dtensor)
add_test(NAME Bench.sequence_parallelism_over_zero3_trains_like_the_unsharded_step_and_dtensor
  COMMAND shardproof_command ${of_mesh} --mesh dp_shard=2,tp=2 --sequence-parallel --against dtensor)
add_test(NAME Bench.products_in_pieces_train_like_the_unsharded_step
  COMMAND shardproof_command ${of_mesh} --mesh tp=2 --sequence-parallel --overlap-pieces 2)
add_test(NAME Bench.hsdp_trains_like_the_unsharded_step_and_pytorch
  COMMAND shardproof_command ${of_mesh} --mesh dp_replicate=2,dp_shard=2 --strategy hsdp --against fsdp2,dtensor)
set_tests_properties(Bench.tensor_parallelism_trains_like_the_unsharded_step_and_dtensor
  Bench.sequence_parallelism_over_zero3_trains_like_the_unsharded_step_and_dtensor
  Bench.hsdp_trains_like_the_unsharded_step_and_pytorch
  Bench.products_in_pieces_train_like_the_unsharded_step PROPERTIES LABELS train)
# What plan predicts has the calls and bytes that ours makes, by copies and side by side; else bench ends with 1.
function(shardproof_predicted name)
  add_test(NAME "Bench.predicted_calls_and_bytes_are_those_of_${name}"
    COMMAND shardproof_command ${of_mesh} --machine h100 ${ARGN})
  set_tests_properties("Bench.predicted_calls_and_bytes_are_those_of_${name}" PROPERTIES LABELS harness)
endfunction()
add_test(NAME Bench.a_prediction_is_printed_beside_what_was_measured COMMAND shardproof_command ${of_mesh} --machine h100)
set_tests_properties(Bench.a_prediction_is_printed_beside_what_was_measured PROPERTIES LABELS harness
  PASS_REGULAR_EXPRESSION "plan predicts for 'h100'.*zero3 [^\n]*%[^\n]*%[^\n]*\nside_by_side [^\n]*%[^\n]*%")
foreach(strategy ddp zero1 zero2 zero3)
  shardproof_predicted(${strategy} --ranks 4 --strategy ${strategy})
endforeach()
foreach(strategy hsdp hfsdp hzero2)
  shardproof_predicted(${strategy} --mesh dp_replicate=2,dp_shard=2 --strategy ${strategy})
endforeach()
shardproof_predicted(tp --mesh tp=2)
shardproof_predicted(zero3_over_tp_in_bf16 --mesh dp_shard=2,tp=2 --precision bf16)
shardproof_predicted(pieces_of_sequences --mesh dp_shard=2,tp=2 --sequence-parallel --overlap-pieces 2)
shardproof_refused(Bench.fsdp2_is_refused_where_the_mesh_has_tp "take --against dtensor"
  $<TARGET_FILE:shardproof_command> ${of_mesh} --mesh dp_shard=2,tp=2 --against fsdp2)
shardproof_refused(Bench.ours_over_gloo_is_refused_in_bfloat16 "python_gloo trains in float32 on the CPU, got --device cpu"
  $<TARGET_FILE:shardproof_command> ${of_mesh} --precision bf16 --against python_gloo)
shardproof_refused(Bench.a_mesh_that_does_not_divide_the_heads_is_refused "tp must divide the 4 heads"
  $<TARGET_FILE:shardproof_command> ${of_mesh} --mesh tp=3)
shardproof_refused(Bench.context_parallelism_is_refused "leave cp out"
  $<TARGET_FILE:shardproof_command> ${of_mesh} --mesh cp=2)
shardproof_refused(Bench.sequence_parallelism_without_tp_is_refused "needs an axis tp"
  $<TARGET_FILE:shardproof_command> ${of_mesh} --mesh dp_shard=2 --sequence-parallel)
shardproof_refused(Bench.pieces_without_tp_are_refused "--overlap-pieces needs an axis tp"
  $<TARGET_FILE:shardproof_command> ${of_mesh} --mesh dp_shard=2 --overlap-pieces 2)
set_tests_properties(Bench.fsdp2_is_refused_where_the_mesh_has_tp Bench.ours_over_gloo_is_refused_in_bfloat16
  Bench.a_mesh_that_does_not_divide_the_heads_is_refused
  Bench.context_parallelism_is_refused Bench.sequence_parallelism_without_tp_is_refused
  Bench.pieces_without_tp_are_refused PROPERTIES LABELS train)
set_tests_properties(Bench.zero3_trains_like_the_unsharded_step Bench.pytorch_trains_like_the_unsharded_step
  Bench.contestants_agree_in_bfloat16 Bench.an_unknown_contestant_is_refused PROPERTIES LABELS train)
