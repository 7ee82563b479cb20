# Tests of checkpoint files; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME checkpoint_formats_props LABEL checkpoint TORCH CASES 300
  SOURCES checkpoint/format/checkpoint_formats_props.cpp checkpoint/format/checkpoint_exports_props.cpp)
shardproof_test(NAME checkpoint_files_props LABEL checkpoint TORCH LIBRARIES harness
  SOURCES checkpoint/checkpoint_boxes_props.cpp checkpoint/format/checkpoint_damage_props.cpp
  checkpoint/format/checkpoint_durable_props.cpp)
shardproof_test(NAME checkpoint_state_props LABEL checkpoint TORCH CASES 60 SOURCES checkpoint/checkpoint_state_props.cpp
  checkpoint/checkpoint_copies_props.cpp checkpoint/checkpoint_manager_props.cpp checkpoint/checkpoint_parallel_props.cpp
  checkpoint/checkpoint_refusals_props.cpp)
shardproof_test(NAME weights_props LABEL checkpoint TORCH CASES 60 LIBRARIES harness
  SOURCES checkpoint/weights_props.cpp checkpoint/weights_files_props.cpp checkpoint/hugging_face_config_props.cpp
  checkpoint/expert_weights_props.cpp)

add_test(NAME Damage.each_of_2000_random_flips_and_cuts_is_found
  COMMAND checkpoint_files_props --gtest_filter=Damage.every_random_flip_and_cut_is_found)
set_tests_properties(Damage.each_of_2000_random_flips_and_cuts_is_found PROPERTIES LABELS "checkpoint;nightly"
  ENVIRONMENT SHARDPROOF_DAMAGES=2000)

shardproof_test(NAME checkpoint_failures_props LABEL checkpoint TORCH LIBRARIES harness
  SOURCES checkpoint/checkpoint_disks_props.cpp checkpoint/checkpoint_failures_props.cpp)
shardproof_test(NAME checkpoint_once_props LABEL checkpoint TORCH CASES 60 SOURCES checkpoint/checkpoint_once_props.cpp)
shardproof_test(NAME checkpoint_kill_props LABEL checkpoint TORCH LIBRARIES harness
  SOURCES checkpoint/checkpoint_kill_props.cpp)
add_test(NAME Killed.each_of_300_kills_leaves_the_last_committed_checkpoint_to_the_bit
  COMMAND checkpoint_kill_props --gtest_filter=Killed.a_process_*)
add_test(NAME Killed.each_of_300_kills_of_two_processes_on_one_folder_loses_and_mixes_nothing
  COMMAND checkpoint_kill_props --gtest_filter=Killed.of_two_processes_*)
set_tests_properties(Killed.each_of_300_kills_leaves_the_last_committed_checkpoint_to_the_bit
  Killed.each_of_300_kills_of_two_processes_on_one_folder_loses_and_mixes_nothing PROPERTIES
  LABELS "checkpoint;nightly" ENVIRONMENT SHARDPROOF_KILLS=300)

shardproof_test(NAME power_loss_props LABEL checkpoint TORCH LIBRARIES harness
  SOURCES checkpoint/power_loss_props.cpp checkpoint/shared_folder_props.cpp
  checkpoint/format/power_loss_files_props.cpp)
add_test(NAME PowerLoss.random_states_of_2000_histories_have_the_last_committed_checkpoint_or_a_later_one
  COMMAND power_loss_props --gtest_filter=PowerLoss.random_states_*)
set_tests_properties(PowerLoss.random_states_of_2000_histories_have_the_last_committed_checkpoint_or_a_later_one PROPERTIES
  LABELS "checkpoint;nightly" ENVIRONMENT SHARDPROOF_POWER_LOSSES=2000)

# What the tests beside PyTorch run.
add_executable(checkpoint_driver doubles/checkpoint_driver.cpp)
target_link_libraries(checkpoint_driver PRIVATE shardproof shardproof_options)
shardproof_uses_torch(checkpoint_driver)
