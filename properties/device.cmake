# Arithmetic on flat memory: the CPU's, and the kernels' in packs, everywhere (`ctest -L device`); on a GPU where there is one
# (`ctest -L cuda`, else skipped with the reason).
function(shardproof_device_test)
  cmake_parse_arguments(ARG "" "NAME;CASES" "SOURCES;LIBRARIES" ${ARGN})
  shardproof_test(NAME ${ARG_NAME} LABEL device CASES ${ARG_CASES} TORCH LIBRARIES shardproof_cuda ${ARG_LIBRARIES}
    SOURCES ${ARG_SOURCES})
  gtest_discover_tests(${ARG_NAME} TEST_PREFIX Cuda. DISCOVERY_TIMEOUT 60 PROPERTIES LABELS cuda RESOURCE_GROUPS 1,gpus:1
    ENVIRONMENT SHARDPROOF_TEST_DEVICE=cuda ENVIRONMENT_MODIFICATION RC_PARAMS=set:max_success=${ARG_CASES})
endfunction()

shardproof_device_test(NAME device_math_props CASES 300 LIBRARIES golden SOURCES
  device/device_math_props.cpp device/device_sums_props.cpp device/device_canonical_props.cpp device/device_curves_props.cpp
  device/device_products_props.cpp)
# Memory of the CPU's tensors that the process keeps.
# How a GPU's launches cover memory, on the CPU: long arrays, short ones, and every alignment.
shardproof_test(NAME device_launch_props LABEL device CASES 1000 LIBRARIES shardproof_cuda SOURCES
  device/device_launch_props.cpp)

# A device that is as late as it may be, on which models run.
add_library(fake_device STATIC doubles/fake_device.cpp doubles/fake_memory.cpp doubles/fake_operators.cpp doubles/fake_math.cpp)
shardproof_uses_torch(fake_device)
target_link_libraries(fake_device PUBLIC shardproof_cuda shardproof_options)
# Streams and events on it, and what it refuses.
shardproof_test(NAME device_order_props LABEL device TORCH LIBRARIES fake_device SOURCES device/device_order_props.cpp)
# Small programs in every order of its streams.
shardproof_test(NAME device_streams_props LABEL device TORCH LIBRARIES fake_device SOURCES device/device_streams_props.cpp)
# Whole models on it.
shardproof_test(NAME device_model_props LABEL device TORCH LIBRARIES fake_device harness SOURCES device/device_model_props.cpp)
add_test(NAME DeviceModels.each_of_1000_random_cases_has_the_golden_runs_bits_on_a_device
  COMMAND device_model_props --gtest_filter=DeviceModels.random_cases_have_the_golden_runs_bits_on_a_device)
set_tests_properties(DeviceModels.each_of_1000_random_cases_has_the_golden_runs_bits_on_a_device PROPERTIES
  LABELS "device;nightly" ENVIRONMENT SHARDPROOF_DEVICE_CASES=1000)
# What it hands to the host, and gets back.
shardproof_test(NAME device_offload_props LABEL device TORCH LIBRARIES fake_device harness SOURCES
  sharding/device_offload_props.cpp kit/toy_modules.cpp)
# What units keep for their backward, there and in the host's memory.
shardproof_test(NAME activations_props LABEL device TORCH LIBRARIES fake_device harness SOURCES
  sharding/activations_props.cpp kit/toy_modules.cpp)
# Checkpoints of what lies on it.
shardproof_test(NAME device_checkpoint_props LABEL device CASES 15 TORCH LIBRARIES fake_device harness
  SOURCES checkpoint/device_checkpoint_props.cpp)
# Training on it under many schedules of ranks, their threads and streams.
shardproof_test(NAME device_schedules_props LABEL device TORCH LIBRARIES fake_device harness SOURCES
  device/device_schedules_props.cpp)
add_test(NAME DeviceSchedules.a_hundred_of_each_case_give_the_same_bits COMMAND device_schedules_props)
set_tests_properties(DeviceSchedules.a_hundred_of_each_case_give_the_same_bits PROPERTIES
  LABELS "device;nightly" ENVIRONMENT SHARDPROOF_SCHEDULES=100 TIMEOUT 7200)
# Steps that it captures and replays; and a GPU.
shardproof_test(NAME step_graph_props LABEL device CASES 20 TORCH LIBRARIES fake_device SOURCES
  sharding/step_graph_props.cpp doubles/echo_comm.cpp)
gtest_discover_tests(step_graph_props TEST_PREFIX Cuda. TEST_FILTER "StepGraphs.*" DISCOVERY_TIMEOUT 60 PROPERTIES LABELS cuda
  RESOURCE_GROUPS 1,gpus:1 ENVIRONMENT SHARDPROOF_TEST_DEVICE=cuda ENVIRONMENT_MODIFICATION RC_PARAMS=set:max_success=20)
# What comes on streams that the library did not choose.
shardproof_test(NAME side_streams_props LABEL device TORCH LIBRARIES fake_device SOURCES
  sharding/side_streams_props.cpp doubles/echo_comm.cpp)
# Process groups of PyTorch on it, as unkind as NCCL's; and the properties of every backend over them, but for those of
# rank-threads and of shared memory.
add_library(unkind_groups STATIC doubles/unkind_groups.cpp)
shardproof_uses_torch(unkind_groups)
target_link_libraries(unkind_groups PUBLIC fake_device harness)
shardproof_test(NAME unkind_groups_props LABEL device TORCH LIBRARIES unkind_groups SOURCES comm/unkind_groups_props.cpp)
add_executable(comm_unkind_props comm/comm_props.cpp comm/comm_programs_props.cpp doubles/comm_worlds.cpp
  doubles/comm_worlds_unkind.cpp)
shardproof_uses_torch(comm_unkind_props)
target_link_libraries(comm_unkind_props PRIVATE unkind_groups golden shardproof_rapidcheck GTest::gtest GTest::gtest_main)
gtest_discover_tests(comm_unkind_props TEST_PREFIX "Unkind."
  TEST_FILTER "-CommThreads.*:Comm.shared_memory*" PROPERTIES LABELS device DISCOVERY_TIMEOUT 60)
# What the commands do with a device.
shardproof_test(NAME device_commands_props LABEL device TORCH LIBRARIES fake_device harness SOURCES
  harness/commands/device_commands_props.cpp)
# Runs that meet what random cases seldom draw.
shardproof_test(NAME device_training_props LABEL device TORCH LIBRARIES harness SOURCES
  device/device_training_props.cpp)
