# Tests of the algebra part; see shardproof_test in CMakeLists.txt. Its laws are cheap, so each runs on many cases.
add_library(layout_testing STATIC gen_layout.cpp spec_layout.cpp spec_collectives.cpp)
target_include_directories(layout_testing PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(layout_testing PUBLIC shardproof_options shardproof ${RAPIDCHECK_LIBRARY})

shardproof_test(NAME algebra_props LABEL layout CASES 1000 LIBRARIES layout_testing SOURCES
  gen_layout_props.cpp mesh_props.cpp layout_props.cpp plan_props.cpp lower_props.cpp)
