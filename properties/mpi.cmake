# The properties of communication over processes, and what befalls processes. `ctest -L mpi`.
shardproof_test(NAME launch_props LABEL mpi TORCH SOURCES comm_worlds.cpp comm_worlds_threads.cpp launch_props.cpp)

if(MPI_C_FOUND)
  add_executable(comm_mpi_props comm_worlds.cpp comm_worlds_mpi.cpp comm_props.cpp comm_programs_props.cpp)
  add_executable(mpi_driver mpi_driver.cpp)
  foreach(target comm_mpi_props mpi_driver)
    shardproof_uses_torch(${target})
    target_link_libraries(${target} PRIVATE shardproof shardproof_mpi)
  endforeach()
  target_link_libraries(comm_mpi_props PRIVATE golden ${RAPIDCHECK_LIBRARY} GTest::gtest)

  foreach(ranks 2 3 4)
    add_test(NAME Mpi.collectives_on_${ranks}_processes COMMAND mpirun -n ${ranks} --oversubscribe --bind-to none
      $<TARGET_FILE:comm_mpi_props> --gtest_filter=-CommThreads.*)
    set_tests_properties(Mpi.collectives_on_${ranks}_processes PROPERTIES LABELS mpi PROCESSORS 2 ENVIRONMENT
      "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMP_NUM_THREADS=1")
  endforeach()

  shardproof_test(NAME mpi_faults_props LABEL mpi TORCH LIBRARIES harness SOURCES mpi_faults_props.cpp)
  target_compile_definitions(mpi_faults_props PRIVATE "MPI_DRIVER=\"$<TARGET_FILE:mpi_driver>\"")
  add_dependencies(mpi_faults_props mpi_driver)
else()
  add_test(NAME Mpi.collectives COMMAND ${CMAKE_COMMAND} -E echo "skipped: this build has no MPI")
  set_tests_properties(Mpi.collectives PROPERTIES LABELS mpi SKIP_REGULAR_EXPRESSION "skipped: this build has no MPI")
endif()
