# The properties of communication over processes, and what befalls processes. `ctest -L mpi`.
shardproof_test(NAME launch_props LABEL mpi TORCH SOURCES doubles/comm_worlds.cpp doubles/comm_worlds_threads.cpp
  launch/launch_props.cpp)

if(MPI_C_FOUND)
  add_executable(comm_mpi_props doubles/comm_worlds.cpp doubles/comm_worlds_mpi.cpp comm/comm_props.cpp
    comm/comm_programs_props.cpp)
  add_executable(mpi_driver doubles/mpi_driver.cpp)
  foreach(target comm_mpi_props mpi_driver)
    shardproof_uses_torch(${target})
    target_link_libraries(${target} PRIVATE shardproof shardproof_mpi)
  endforeach()
  target_link_libraries(comm_mpi_props PRIVATE golden shardproof_rapidcheck GTest::gtest)

  foreach(ranks 2 3 4)
    set(_name Mpi.collectives_on_${ranks}_processes)
    add_test(NAME ${_name} COMMAND mpirun -n ${ranks} --oversubscribe --bind-to none $<TARGET_FILE:comm_mpi_props>
      --gtest_filter=-CommThreads.*)
    set_tests_properties(${_name} PROPERTIES LABELS mpi PROCESSORS 2 ENVIRONMENT
      "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMP_NUM_THREADS=1")
  endforeach()

  # The command itself. Seeds are fixed: what random ones find belongs to `verify`.
  set(_verify --backend mpi --cases 40 --no-python --failures "${CMAKE_BINARY_DIR}/mpi_failures")
  foreach(ranks 2 4)
    add_test(NAME Mpi.random_cases_hold_on_${ranks}_processes
      COMMAND shardproof_command verify ${_verify} --ranks ${ranks} --seed ${ranks})
    add_test(NAME Mpi.training_equals_the_golden_run_on_${ranks}_processes
      COMMAND shardproof_command train --backend mpi --ranks ${ranks} --steps 3 --check)
  endforeach()
  shardproof_refused(Mpi.ranks_with_other_arguments_are_refused
    "the command line is '[^']*--seed 1' on rank 0 and '[^']*--seed 2' on rank 1" mpirun
    -n 1 --oversubscribe $<TARGET_FILE:shardproof_command> verify ${_verify} --seed 1 :
    -n 1 --oversubscribe $<TARGET_FILE:shardproof_command> verify ${_verify} --seed 2)
  set_tests_properties(Mpi.random_cases_hold_on_2_processes Mpi.random_cases_hold_on_4_processes
    Mpi.training_equals_the_golden_run_on_2_processes Mpi.training_equals_the_golden_run_on_4_processes
    Mpi.ranks_with_other_arguments_are_refused PROPERTIES LABELS mpi PROCESSORS 2
    ENVIRONMENT "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMP_NUM_THREADS=1")

  shardproof_test(NAME mpi_faults_props LABEL mpi ALONE LIBRARIES nlohmann_json::nlohmann_json SOURCES
    comm/mpi/mpi_faults_props.cpp "${PROJECT_SOURCE_DIR}/harness/commands/flight.cpp"
    "${PROJECT_SOURCE_DIR}/impl/src/base/escape.cpp")
  target_include_directories(mpi_faults_props PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/impl/include")
  target_compile_definitions(mpi_faults_props PRIVATE "MPI_DRIVER=\"$<TARGET_FILE:mpi_driver>\"")
  add_dependencies(mpi_faults_props mpi_driver)
else()
  add_test(NAME Mpi.collectives COMMAND ${CMAKE_COMMAND} -E echo "skipped: this build has no MPI")
  set_tests_properties(Mpi.collectives PROPERTIES LABELS mpi SKIP_REGULAR_EXPRESSION "skipped: this build has no MPI")
endif()
foreach(option timeout flight-dir)
  shardproof_refused(Launch.threads_refuse_${option}_which_has_no_effect "--${option} is for --backend.*got --backend threads"
    $<TARGET_FILE:shardproof_command> verify --cases 1 --${option} 3)
  set_tests_properties(Launch.threads_refuse_${option}_which_has_no_effect PROPERTIES LABELS comm)
endforeach()
