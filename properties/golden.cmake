# Tests of the golden part; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME golden_props LABEL golden TORCH ALONE LIBRARIES golden
  SOURCES golden/golden_props.cpp golden/golden_norm_props.cpp golden/golden_collectives_props.cpp
  golden/golden_experts_props.cpp golden/golden_family_props.cpp golden/golden_sums_props.cpp)
if(SHARDPROOF_EMBED_PYTHON)
  shardproof_test(NAME golden_python_props LABEL golden SEED 7 TORCH ALONE LIBRARIES golden SOURCES
    golden/golden_python_props.cpp)
  target_compile_definitions(golden_python_props PRIVATE "GOLDEN_PYTHON_VERSION=\"${GOLDEN_PYTHON_VERSION}\"")
endif()
