# Tests of the golden part; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME golden_python_props LABEL train TORCH ALONE LIBRARIES golden SOURCES golden_python_props.cpp)
