# Tests of the data-parallel library; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME sharding_props LABEL train TORCH SOURCES sharding/sharding_props.cpp sharding/sharding_errors_props.cpp
  sharding/disagreement_props.cpp sharding/strategies_props.cpp kit/toy_modules.cpp)
shardproof_test(NAME optimizer_props LABEL train TORCH SOURCES optim/optimizer_props.cpp optim/lr_schedule_props.cpp)
shardproof_test(NAME ema_props LABEL train TORCH CASES 60 SOURCES optim/ema_props.cpp kit/drawn_sharding.cpp
  kit/toy_modules.cpp)
shardproof_test(NAME transfer_props LABEL train TORCH CASES 60 SOURCES sharding/transfer_props.cpp kit/drawn_sharding.cpp
  kit/toy_modules.cpp)
shardproof_test(NAME lora_props LABEL parallel TORCH CASES 20 SOURCES models/lora_props.cpp kit/toy_modules.cpp)
shardproof_test(NAME fingerprint_props LABEL train TORCH SOURCES device/fingerprint_props.cpp
  optim/fingerprint_check_props.cpp)
shardproof_test(NAME direct_gradients_props LABEL train TORCH CASES 300 SOURCES sharding/direct_gradients_props.cpp
  kit/toy_modules.cpp)
shardproof_test(NAME delayed_gradients_props LABEL train TORCH CASES 150 LIBRARIES fake_device harness SOURCES
  sharding/delayed_gradients_props.cpp kit/toy_modules.cpp)
shardproof_test(NAME in_flight_props LABEL train TORCH SOURCES sharding/in_flight_props.cpp
  kit/parity_models.cpp kit/parity_training.cpp kit/toy_modules.cpp)
shardproof_test(NAME offload_props LABEL train TORCH LIBRARIES harness SOURCES sharding/offload_props.cpp kit/toy_modules.cpp)
shardproof_test(NAME strategy_formulas_props LABEL train TORCH SOURCES sharding/strategy_formulas_props.cpp kit/toy_modules.cpp)

# The main job, a slice of it for every strategy: random cases against their golden runs.
set(_failures "${CMAKE_BINARY_DIR}/failures")
foreach(strategy ddp zero1 zero2 zero3 hsdp hfsdp hzero2 row_b_t_sr row_sr_s_sr)
  add_test(NAME Verify.random_cases_of_${strategy}_equal_their_golden_runs
    COMMAND shardproof_command verify --strategy ${strategy} --cases 150 --seed 7 --no-python --failures ${_failures})
  add_test(NAME Verify.thousands_of_random_cases_of_${strategy}_equal_their_golden_runs
    COMMAND shardproof_command verify --strategy ${strategy} --cases 5000 --seed 11 --no-python --failures ${_failures})
  set_tests_properties(Verify.random_cases_of_${strategy}_equal_their_golden_runs PROPERTIES LABELS train)
  set_tests_properties(Verify.thousands_of_random_cases_of_${strategy}_equal_their_golden_runs PROPERTIES
    LABELS nightly TIMEOUT 7200)
endforeach()
# One answer on every mesh, whatever the backend's order of sums.
add_test(NAME Verify.canonical_cases_equal_their_golden_runs
  COMMAND shardproof_command verify --mode canonical --cases 300 --seed 13 --no-python --failures ${_failures})
add_test(NAME Verify.thousands_of_canonical_cases_equal_their_golden_runs
  COMMAND shardproof_command verify --mode canonical --cases 5000 --seed 17 --no-python --failures ${_failures})
set_tests_properties(Verify.canonical_cases_equal_their_golden_runs PROPERTIES LABELS train)
set_tests_properties(Verify.thousands_of_canonical_cases_equal_their_golden_runs PROPERTIES LABELS nightly TIMEOUT 7200)

add_test(NAME Verify.the_golden_run_agrees_with_pytorch_in_python
  COMMAND shardproof_command verify --cases 100 --seed 3 --failures ${_failures})
set_tests_properties(Verify.the_golden_run_agrees_with_pytorch_in_python PROPERTIES LABELS train)

shardproof_test(NAME placements_props LABEL train TORCH CASES 60 SOURCES sharding/placements_props.cpp
  sharding/whole_values_props.cpp kit/drawn_sharding.cpp kit/toy_modules.cpp)
shardproof_test(NAME granules_props LABEL train TORCH CASES 300 SOURCES sharding/granules_props.cpp
  kit/parity_models.cpp kit/parity_training.cpp kit/toy_modules.cpp)
shardproof_test(NAME canonical_props LABEL parallel TORCH SOURCES nn/canonical/canonical_props.cpp
  nn/canonical/canonical_refusals_props.cpp)
shardproof_test(NAME context_props LABEL parallel TORCH CASES 200 SOURCES parallel/context/context_props.cpp
  kit/parallel_models.cpp)
shardproof_test(NAME experts_props LABEL parallel TORCH SOURCES parallel/experts/experts_props.cpp
  parallel/experts/products_props.cpp parallel/experts/router_props.cpp parallel/experts/slices_props.cpp
  kit/parity_training.cpp kit/toy_modules.cpp)
shardproof_test(NAME dropout_props LABEL parallel TORCH SOURCES nn/dropout_props.cpp kit/parallel_models.cpp)
# Threads of OpenMP that spin while they wait take the core of the test beside this one, which doubles the time of both.
shardproof_test(NAME transformers_props LABEL parallel TORCH LIBRARIES golden SOURCES models/transformers_props.cpp
  models/transformers_precision_props.cpp ENVIRONMENT OMP_WAIT_POLICY=passive)
add_test(NAME TransformersPrecision.losses_and_gradients_of_long_sequences_are_as_exact_as_those_of_the_package
  COMMAND transformers_props --gtest_filter=TransformersPrecision.losses_*)
set_tests_properties(TransformersPrecision.losses_and_gradients_of_long_sequences_are_as_exact_as_those_of_the_package
  PROPERTIES LABELS nightly TIMEOUT 7200 ENVIRONMENT "SHARDPROOF_TOKENS=1024 4096")
shardproof_test(NAME parallel_props LABEL parallel TORCH CASES 200 SOURCES
  parallel/collective_ops_props.cpp parallel/lifetimes_props.cpp parallel/tensor/parallel_layers_props.cpp
  parallel/tensor/overlap_pieces_props.cpp parallel/tensor/parallel_models_props.cpp optim/parallel_muon_props.cpp
  kit/parallel_models.cpp
  kit/toy_modules.cpp)
# A device that is late counts what the host waits for, and bytes.
shardproof_test(NAME cross_entropy_props LABEL parallel TORCH CASES 500 LIBRARIES fake_device harness SOURCES
  parallel/tensor/cross_entropy_props.cpp kit/toy_modules.cpp)
