# Kernels: their twins on the CPU everywhere (`ctest -L device`), themselves where there is a GPU (`ctest -L cuda`, else skipped
# with the reason).
function(shardproof_device_test)
  cmake_parse_arguments(ARG "" "NAME;CASES" "SOURCES;LIBRARIES" ${ARGN})
  shardproof_test(NAME ${ARG_NAME} LABEL device CASES ${ARG_CASES} TORCH LIBRARIES shardproof_cuda ${ARG_LIBRARIES}
    SOURCES ${ARG_SOURCES})
  gtest_discover_tests(${ARG_NAME} TEST_PREFIX Cuda. DISCOVERY_TIMEOUT 60 PROPERTIES LABELS cuda RESOURCE_GROUPS 1,gpus:1
    ENVIRONMENT "SHARDPROOF_TEST_DEVICE=cuda;RC_PARAMS=max_success=${ARG_CASES}")
endfunction()

shardproof_device_test(NAME device_math_props CASES 300 SOURCES device_math_props.cpp device_sums_props.cpp)

# Streams and events, on a device that is as late as it may be.
shardproof_test(NAME device_order_props LABEL device TORCH LIBRARIES shardproof_cuda SOURCES
  fake_device.cpp device_order_props.cpp)
# Whole runs with the kernels' twins in the place of the library's loops.
shardproof_test(NAME device_training_props LABEL device TORCH LIBRARIES shardproof_cuda harness SOURCES
  device_training_props.cpp)
