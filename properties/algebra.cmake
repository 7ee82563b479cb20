# Tests of the algebra part; see shardproof_test in CMakeLists.txt. Its laws are cheap, so each runs on many
# cases.
add_library(layout_testing STATIC kit/gen_layout.cpp kit/spec_layout.cpp kit/spec_collectives.cpp)
target_include_directories(layout_testing PUBLIC
  $<TARGET_PROPERTY:shardproof_algebra,INTERFACE_INCLUDE_DIRECTORIES>)
target_link_libraries(layout_testing PUBLIC shardproof_options shardproof_rapidcheck)

shardproof_test(NAME algebra_props LABEL layout CASES 1000 ALONE SOURCES base/escape_props.cpp
  base/nearest_props.cpp kit/gen_layout_props.cpp algebra/mesh_props.cpp algebra/split_props.cpp algebra/layout_props.cpp
  algebra/plan_props.cpp algebra/lower_props.cpp
  LIBRARIES layout_testing shardproof_algebra)
# Not to load LibTorch, of which it needs nothing and which takes 100 times as long as most tests.
# The wheel's libraries also export parts of libstdc++, so that one has to come first.
target_link_options(algebra_props PRIVATE LINKER:--no-as-needed -lstdc++ LINKER:--as-needed)
