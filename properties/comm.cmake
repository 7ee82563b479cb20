# Tests of the comm part; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME comm_props LABEL comm TORCH LIBRARIES golden SOURCES
  base/host_work_props.cpp base/stream_copy_props.cpp doubles/comm_worlds.cpp doubles/comm_worlds_threads.cpp
  comm/collective_plan_props.cpp comm/comm_props.cpp comm/comm_errors_props.cpp comm/comm_decorators_props.cpp
  comm/comm_faults_props.cpp comm/flight_record_props.cpp comm/comm_programs_props.cpp comm/mesh_comm_props.cpp
  comm/watch_sockets_props.cpp comm/threads/comm_threads_props.cpp)
# What a build without some backend has in its place.
shardproof_test(NAME absent_props LABEL comm TORCH LIBRARIES shardproof_absent SOURCES comm/absent_props.cpp)
shardproof_test(NAME redistribute_props LABEL comm CASES 1000 TORCH LIBRARIES layout_testing SOURCES
  doubles/comm_worlds.cpp doubles/comm_worlds_threads.cpp comm/redistribute_props.cpp)

# A Python module of ci/tests/c10d_ranks.py. Python brings its own symbols, and torch those of libtorch_python.
if(SHARDPROOF_EMBED_PYTHON)
  set(Python3_EXECUTABLE "${SHARDPROOF_VENV}/bin/python")
  find_package(Python3 REQUIRED COMPONENTS Interpreter Development.Embed)
  add_library(c10d_driver MODULE doubles/c10d_driver.cpp doubles/comm_worlds.cpp)
  set_target_properties(c10d_driver PROPERTIES PREFIX "")
  target_include_directories(c10d_driver PRIVATE "${PROJECT_SOURCE_DIR}" ${Python3_INCLUDE_DIRS})
  target_link_libraries(c10d_driver PRIVATE shardproof shardproof_options golden GTest::gtest
    "${SHARDPROOF_TORCH_DIR}/lib/libtorch_python.so")
  shardproof_uses_torch(c10d_driver)
endif()
