# Tests of the scripts in ci/, and of what the tree itself has to keep to.
set(_ci_tests_dir "${CMAKE_SOURCE_DIR}/ci/tests")

# shardproof_python_tests(NAME check_layers CLASS CheckLayers [LABEL ci]): each method of the unittest class in
# ci/tests/NAME_test.py is its own ctest entry, "Class.method"; one that unittest skips is skipped.
function(shardproof_python_tests)
  cmake_parse_arguments(ARG "" "NAME;CLASS;LABEL" "" ${ARGN})
  if(NOT ARG_LABEL)
    set(ARG_LABEL ci)
  endif()
  set(file "${_ci_tests_dir}/${ARG_NAME}_test.py")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
  file(STRINGS "${file}" methods REGEX "^    def test_")
  foreach(line IN LISTS methods)
    string(REGEX REPLACE "^    def test_([a-z0-9_]+).*" "\\1" sentence "${line}")
    add_test(NAME "${ARG_CLASS}.${sentence}"
      COMMAND "${SHARDPROOF_VENV}/bin/python" "${file}" -v "${ARG_CLASS}.test_${sentence}")
    set_tests_properties("${ARG_CLASS}.${sentence}" PROPERTIES LABELS ${ARG_LABEL}
      SKIP_REGULAR_EXPRESSION "OK \\(skipped=" ENVIRONMENT "SHARDPROOF_BUILD=${CMAKE_BINARY_DIR};PYTHONDONTWRITEBYTECODE=1")
  endforeach()
endfunction()

add_test(NAME Tree.keeps_to_the_layers COMMAND "${CMAKE_SOURCE_DIR}/ci/check_layers")
add_test(NAME Tree.documents_name_tests_and_files_that_exist COMMAND "${CMAKE_SOURCE_DIR}/ci/check_docs")
set_tests_properties(Tree.keeps_to_the_layers Tree.documents_name_tests_and_files_that_exist PROPERTIES LABELS ci)
if(SHARDPROOF_EMBED_PYTHON)
  shardproof_python_tests(NAME c10d CLASS ProcessGroup)
endif()
shardproof_python_tests(NAME check_docs CLASS CheckDocs)
shardproof_python_tests(NAME check_layers CLASS CheckLayers)
shardproof_python_tests(NAME checkpoint CLASS Checkpoint)
shardproof_python_tests(NAME checkpoint_releases CLASS CheckpointReleases)
shardproof_python_tests(NAME checkpoint_training CLASS CheckpointTraining)
shardproof_python_tests(NAME docs CLASS Docs)
shardproof_python_tests(NAME docs_nightly CLASS DocsNightly LABEL nightly)
shardproof_python_tests(NAME faults CLASS Faults)
shardproof_python_tests(NAME gpu CLASS Gpu)
shardproof_python_tests(NAME hugging_face CLASS HuggingFace)
shardproof_python_tests(NAME install CLASS Install)
shardproof_python_tests(NAME kernels_ptx CLASS KernelsPtx LABEL device)
shardproof_python_tests(NAME lock CLASS Lock)
shardproof_python_tests(NAME plan CLASS Plan)
shardproof_python_tests(NAME report_browser CLASS ReportInABrowser)
shardproof_python_tests(NAME train CLASS Train)
shardproof_python_tests(NAME usage CLASS Usage)
shardproof_python_tests(NAME verify CLASS Command)
shardproof_python_tests(NAME version CLASS Version)
if(MPI_C_FOUND)
  shardproof_python_tests(NAME two_hosts CLASS TwoHosts LABEL mpi)
endif()

shardproof_test(NAME training_props LABEL train TORCH SOURCES harness/train/text_data_props.cpp
  harness/compare/step_difference_props.cpp
  LIBRARIES harness)
