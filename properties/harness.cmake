# Tests of the harness part; see shardproof_test in CMakeLists.txt.
