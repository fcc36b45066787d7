/* What the derivative of filter_poses takes and makes. */
#ifndef MDPS_FILTER_GRADIENTS_H
#define MDPS_FILTER_GRADIENTS_H
#include "filter_steps.h"

/* states, posterior, log_sum, ess and drawn, from five places of the stack. */
FilterSteps take_steps(Call *call, const StableIValue *values);
/* Gradients of states, predicted, posterior, log_sum and ess, each optional, from five places of the stack. */
FilterGradients take_gradients(Call *call, const StableIValue *values, const FilterSteps *s);
/* Room in g for the gradients of the arguments and what lies between, of all rows; zeros where steps add up. */
void new_gradients(Call *call, const FilterModels *m, FilterGradients *g);
#endif
