# Tests of the harness part; see shardproof_test in CMakeLists.txt.
shardproof_test(NAME case_props LABEL harness TORCH LIBRARIES harness SOURCES harness/case/case_props.cpp
  sharding/named_options_props.cpp harness/case/facets_props.cpp harness/case/mesh_order_props.cpp
  harness/case/together_props.cpp harness/case/work_props.cpp)
shardproof_test(NAME comparison_props LABEL harness TORCH LIBRARIES harness SOURCES harness/compare/comparison_props.cpp
  harness/case/exact_props.cpp
  harness/commands/campaign_props.cpp)
shardproof_test(NAME explain_props LABEL harness TORCH LIBRARIES harness SOURCES harness/run/explain_props.cpp
  harness/run/guesses_props.cpp
  harness/run/module_difference_props.cpp harness/run/replicas_props.cpp)
shardproof_test(NAME report_props LABEL harness TORCH LIBRARIES harness SOURCES harness/commands/report_props.cpp
  harness/commands/launch_options_props.cpp
  harness/run/picture_props.cpp)
shardproof_test(NAME crash_props LABEL harness TORCH LIBRARIES harness SOURCES harness/commands/crash_report_props.cpp
  harness/commands/workers_props.cpp)
shardproof_test(NAME trace_props LABEL harness TORCH LIBRARIES harness SOURCES harness/run/trace_file_props.cpp)
shardproof_test(NAME property_props LABEL harness TORCH LIBRARIES harness SOURCES harness/run/property_props.cpp
  harness/commands/causes_props.cpp)
shardproof_test(NAME schedules_props LABEL harness CASES 50 TORCH LIBRARIES harness SOURCES harness/run/policies_props.cpp
  harness/run/planted_change_props.cpp harness/run/schedules_props.cpp)
shardproof_test(NAME plan_props LABEL harness TORCH LIBRARIES harness SOURCES harness/plan/dry_run_props.cpp
  harness/plan/timeline_props.cpp harness/plan/plan_files_props.cpp)
shardproof_test(NAME hugging_face_props LABEL checkpoint TORCH LIBRARIES harness SOURCES harness/commands/hugging_face_props.cpp
  kit/parallel_models.cpp kit/toy_modules.cpp)

# The main property, once a strategy: random sharded training equals its unsharded golden run.
function(shardproof_verify name label)
  add_test(NAME "Verify.${name}" COMMAND shardproof_command verify ${ARGN}
    --failures "${CMAKE_CURRENT_BINARY_DIR}/failures/${name}" WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}")
  set_tests_properties("Verify.${name}" PROPERTIES LABELS "${label}")
endfunction()
shardproof_verify(cases_of_the_corpus_equal_their_golden_runs train --cases 1 --no-python
  --corpus "${CMAKE_CURRENT_SOURCE_DIR}/corpus")
shardproof_verify(cases_have_the_same_bits_under_every_schedule train --cases 25 --seed 45 --schedules 8 --no-python)
shardproof_verify(many_cases_have_the_same_bits_under_every_schedule nightly --cases 300 --seed 46 --schedules 100 --no-python)
set_tests_properties(Verify.many_cases_have_the_same_bits_under_every_schedule PROPERTIES TIMEOUT 7200)
shardproof_verify(wide_worlds_equal_their_golden_runs nightly --world-max 64 --cases 500 --seed 43)
shardproof_verify(tiny_cases_equal_their_golden_runs train --tiny --cases 500 --seed 44 --no-python)
