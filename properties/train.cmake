# Tests of the train part; see shardproof_test in CMakeLists.txt.
