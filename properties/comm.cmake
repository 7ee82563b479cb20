# Tests of the comm part; see shardproof_test in CMakeLists.txt.
