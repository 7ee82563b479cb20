# Tests of the comm part; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME comm_props LABEL comm TORCH LIBRARIES golden SOURCES
  comm_worlds.cpp comm_props.cpp comm_errors_props.cpp comm_decorators_props.cpp)
