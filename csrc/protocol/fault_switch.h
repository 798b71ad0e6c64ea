// Defects for mutation testing, each a switch of the compiler where it would arise.
//
// ALLNORM_FAULT(name, wrong, right) is `right`, unless the build defines ALLNORM_FAULT_<name> as 1:
// then it is `wrong`. Either may be empty; a comma in them stands in parentheses. A fault without a
// test that reports it is an error: tests/native/kernel_mutants/table.py names the test of each,
// and `make mutants` builds them one by one.
#ifndef ALLNORM_PROTOCOL_FAULT_SWITCH_H_
#define ALLNORM_PROTOCOL_FAULT_SWITCH_H_

#define ALLNORM_FAULT(name, wrong, right) ALLNORM_FAULT_IF(ALLNORM_FAULT_##name, wrong, right)
// Pastes the value of the definition, which is 1, or else the name: that makes one argument.
#define ALLNORM_FAULT_IF(value, wrong, right) ALLNORM_FAULT_CHOOSE(value, wrong, right)
#define ALLNORM_FAULT_CHOOSE(value, wrong, right) \
  ALLNORM_FAULT_TAKE(ALLNORM_FAULT_IS_##value wrong, right, )
#define ALLNORM_FAULT_IS_1 0,
#define ALLNORM_FAULT_TAKE(...) ALLNORM_FAULT_SECOND(__VA_ARGS__)
#define ALLNORM_FAULT_SECOND(first, second, ...) second

#endif  // ALLNORM_PROTOCOL_FAULT_SWITCH_H_
