# Tests of the data-parallel library; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME sharding_props LABEL train TORCH SOURCES sharding_props.cpp sharding_errors_props.cpp toy_modules.cpp)
shardproof_test(NAME optimizer_props LABEL train TORCH SOURCES optimizer_props.cpp)
