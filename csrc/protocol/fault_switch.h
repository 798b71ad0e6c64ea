// Defects for mutation testing, each behind a compile-time switch in the code.
//
// ALLNORM_FAULT(name, wrong, right) expands to `right`. If the build defines ALLNORM_FAULT_<name>
// as 1, it expands to `wrong`. Either may be empty; a comma in them must be inside parentheses.
// Every fault needs a test that detects it. tests/native/kernel_mutants/table.py names that test,
// and `make mutants` builds the faults one by one.
#pragma once

#define ALLNORM_FAULT(name, wrong, right) ALLNORM_FAULT_IF(ALLNORM_FAULT_##name, wrong, right)
// Pastes the value of the definition (1), or the name if it is not defined, into one argument.
#define ALLNORM_FAULT_IF(value, wrong, right) ALLNORM_FAULT_CHOOSE(value, wrong, right)
#define ALLNORM_FAULT_CHOOSE(value, wrong, right) \
  ALLNORM_FAULT_TAKE(ALLNORM_FAULT_IS_##value wrong, right, )
#define ALLNORM_FAULT_IS_1 0,
#define ALLNORM_FAULT_TAKE(...) ALLNORM_FAULT_SECOND(__VA_ARGS__)
#define ALLNORM_FAULT_SECOND(first, second, ...) second
