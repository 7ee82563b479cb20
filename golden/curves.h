// The functions of canonical arithmetic that are no IEEE operation: the sequences of docs/canonical.md, written as loops over
// their coefficients.
#pragma once

namespace golden::exact {

double exp(double x);
double log(double x);
double tanh(double x);
// What the normal distribution has below x.
double normal_below(double x);

}  // namespace golden::exact
