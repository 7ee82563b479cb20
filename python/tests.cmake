# Each file of python/tests is a test of CTest, Python.<file>, with the label python.
file(GLOB _tests CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/test_*.py")
foreach(path IN LISTS _tests)
  cmake_path(GET path STEM name)
  string(REGEX REPLACE "^test_" "" name "${name}")
  add_test(NAME "Python.${name}" COMMAND "${SHARDPROOF_VENV}/bin/python" -m pytest -q -rs -p no:cacheprovider "${path}"
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties("Python.${name}" PROPERTIES LABELS python
    ENVIRONMENT "PYTHONPATH=${CMAKE_BINARY_DIR}/python;PYTHONDONTWRITEBYTECODE=1;OMP_NUM_THREADS=1;MKL_CBWR=AUTO")
endforeach()

# Campaigns over PyTorch's own engines and models of others, and the reruns of what was found, take minutes.
set_tests_properties(Python.check_engines Python.check_findings Python.verify_zoo PROPERTIES LABELS "python;nightly")
# Its models and modules take 13 minutes of one core, which beside other tests is more than the 25 minutes that CTest gives.
set_tests_properties(Python.verify_zoo PROPERTIES TIMEOUT 7200)

# Where peft or torchtitan is not installed nothing of these files runs, and the test says that it was skipped, and why.
set_tests_properties(Python.peft PROPERTIES SKIP_REGULAR_EXPRESSION "peft is not installed")
set_tests_properties(Python.torchtitan PROPERTIES SKIP_REGULAR_EXPRESSION "torchtitan is not installed")

# Without a GPU the test says that it was skipped, and why. `ctest -L cuda` has it too.
set_tests_properties(Python.cuda PROPERTIES LABELS "python;cuda" SKIP_REGULAR_EXPRESSION "CUDA cannot be used here")
