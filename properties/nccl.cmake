# The NCCL backend. `ctest -L nccl`: on a double of NCCL everywhere, and on GPUs where there are any.
add_library(nccl_double STATIC doubles/nccl_double.cpp doubles/nccl_double_calls.cpp doubles/nccl_double_sums.cpp
  doubles/nccl_worlds.cpp doubles/comm_worlds.cpp
  doubles/comm_worlds_nccl.cpp)
target_link_libraries(nccl_double PUBLIC shardproof shardproof_nccl shardproof_cuda golden shardproof_options GTest::gtest)
shardproof_uses_torch(nccl_double)

# The properties of every backend, over this one.
add_executable(comm_nccl_props comm/comm_props.cpp comm/comm_programs_props.cpp)
shardproof_uses_torch(comm_nccl_props)
target_link_libraries(comm_nccl_props PRIVATE nccl_double shardproof_rapidcheck GTest::gtest_main)
# Without CommThreads, which are of rank-threads, and shared memory, which GPUs have not.
gtest_discover_tests(comm_nccl_props TEST_PREFIX "NcclDouble." TEST_FILTER "-CommThreads.*:Comm.shared_memory*"
  PROPERTIES LABELS nccl DISCOVERY_TIMEOUT 60)

shardproof_test(NAME nccl_props LABEL nccl TORCH LIBRARIES nccl_double SOURCES comm/nccl/nccl_props.cpp
  comm/nccl/nccl_buffers_props.cpp comm/nccl/nccl_errors_props.cpp)
shardproof_test(NAME nccl_training_props LABEL nccl TORCH LIBRARIES nccl_double harness SOURCES
  comm/nccl/nccl_training_props.cpp)

# `shardproof` over the doubles, and thousands of random cases over each.
add_executable(shardproof_doubles doubles/shardproof_doubles.cpp)
shardproof_uses_torch(shardproof_doubles)
target_link_libraries(shardproof_doubles PRIVATE nccl_double unkind_groups)
foreach(backend late_device drawn_device late_groups drawn_groups nccl_double)
  set(over shardproof_doubles verify --backend ${backend} --world-max 4 --no-python
    --failures ${CMAKE_CURRENT_BINARY_DIR}/failures_${backend})
  add_test(NAME Doubles.random_cases_over_${backend}_hold COMMAND ${over} --cases 40 --seed 49)
  add_test(NAME Doubles.each_of_2000_random_cases_over_${backend}_holds COMMAND ${over} --cases 2000 --seed 50)
  set_tests_properties(Doubles.random_cases_over_${backend}_hold PROPERTIES LABELS device)
  set_tests_properties(Doubles.each_of_2000_random_cases_over_${backend}_holds PROPERTIES LABELS "device;nightly" TIMEOUT 7200)
endforeach()

# What a campaign found: a kernel is given the address of a tensor without elements, which is no memory of the device.
string(CONCAT _case "mlp(widths=1-1-1-1,act=identity,bias=0) mesh(tp=2) "
  "zero3(units=root,alignment_bytes=64,loss=sum,arithmetic=canonical,overlap_pieces=2) sgd(lr=0.1) canonical "
  "seed=540110 : step")
add_test(NAME Doubles.a_kernel_on_no_elements_reads_nothing
  COMMAND shardproof_doubles replay --backend late_device "${_case}")
set_tests_properties(Doubles.a_kernel_on_no_elements_reads_nothing PROPERTIES LABELS device)
shardproof_refused(Launch.a_backend_that_nobody_registered_is_refused_with_the_names
  "--backend must be one of threads, mpi, nccl, drawn_device, .*got 'late_devices'"
  $<TARGET_FILE:shardproof_doubles> verify --cases 1 --backend late_devices)
shardproof_refused(Launch.registered_ranks_refuse_options_of_other_ranks
  "--timeout is for --backend mpi or nccl, got --backend late_device"
  $<TARGET_FILE:shardproof_doubles> verify --cases 1 --backend late_device --timeout 3)
shardproof_refused(Launch.registered_ranks_refuse_a_device "--backend late_device has a device and ranks of its own"
  $<TARGET_FILE:shardproof_doubles> verify --cases 1 --backend late_device --device cuda)
set_tests_properties(Launch.a_backend_that_nobody_registered_is_refused_with_the_names
  Launch.registered_ranks_refuse_options_of_other_ranks Launch.registered_ranks_refuse_a_device PROPERTIES LABELS device)

# What is decided at launch, and processes that the program starts itself.
add_executable(nccl_driver doubles/nccl_driver.cpp)
shardproof_uses_torch(nccl_driver)
target_link_libraries(nccl_driver PRIVATE nccl_double)
shardproof_test(NAME nccl_launch_props LABEL nccl LIBRARIES shardproof_nccl SOURCES launch/nccl_launch_props.cpp)
add_dependencies(nccl_launch_props nccl_driver)

# The binding itself, where there is one. The doubles have the file name of NCCL's library, so the dynamic loader takes them
# for it, and their entry points come before those of the CUDA runtime.
if(TARGET shardproof::nccl)
  foreach(double gpu_libraries gpu_libraries_before_windows)
    add_library(${double} SHARED doubles/gpu_libraries.cpp)
    target_include_directories(${double} SYSTEM PUBLIC
      $<TARGET_PROPERTY:shardproof::nccl,INTERFACE_INCLUDE_DIRECTORIES>)
    target_link_libraries(${double} PRIVATE shardproof_options)
    set_target_properties(${double} PROPERTIES OUTPUT_NAME nccl SOVERSION 2
      LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/${double}")
  endforeach()
  target_compile_definitions(gpu_libraries_before_windows PRIVATE NCCL_BEFORE_WINDOWS)
  shardproof_test(NAME nccl_api_props LABEL nccl TORCH LIBRARIES gpu_libraries shardproof_nccl shardproof_cuda SOURCES
    comm/nccl/nccl_api_props.cpp)
  shardproof_test(NAME nccl_old_props LABEL nccl TORCH LIBRARIES gpu_libraries_before_windows shardproof_nccl SOURCES
    comm/nccl/nccl_old_props.cpp)
endif()
