# Tests of the comm part; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME comm_props LABEL comm TORCH LIBRARIES golden SOURCES
  comm_worlds.cpp comm_worlds_threads.cpp comm_props.cpp comm_errors_props.cpp comm_decorators_props.cpp comm_faults_props.cpp
  comm_programs_props.cpp comm_threads_props.cpp)
shardproof_test(NAME redistribute_props LABEL comm CASES 1000 TORCH LIBRARIES layout_testing SOURCES
  comm_worlds.cpp comm_worlds_threads.cpp redistribute_props.cpp)
