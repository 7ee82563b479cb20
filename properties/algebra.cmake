# Tests of the algebra part; see shardproof_test in CMakeLists.txt.
