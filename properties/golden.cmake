# Tests of the golden part; see shardproof_test in CMakeLists.txt.
