# Tests of checkpoint files; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME checkpoint_formats_props LABEL checkpoint TORCH CASES 300
  SOURCES checkpoint_formats_props.cpp checkpoint_exports_props.cpp)
shardproof_test(NAME checkpoint_files_props LABEL checkpoint TORCH
  SOURCES checkpoint_boxes_props.cpp checkpoint_damage_props.cpp checkpoint_durable_props.cpp)
shardproof_test(NAME checkpoint_state_props LABEL checkpoint TORCH CASES 60 SOURCES checkpoint_state_props.cpp
  checkpoint_manager_props.cpp checkpoint_parallel_props.cpp checkpoint_refusals_props.cpp)

add_test(NAME Damage.each_of_2000_random_flips_and_cuts_is_found
  COMMAND checkpoint_files_props --gtest_filter=Damage.every_random_flip_and_cut_is_found)
set_tests_properties(Damage.each_of_2000_random_flips_and_cuts_is_found PROPERTIES LABELS "checkpoint;nightly"
  ENVIRONMENT SHARDPROOF_DAMAGES=2000)
