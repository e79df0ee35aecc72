#include "attention_elements.h"
namespace jachess {
int attention_jet_backward_cuda(const AttentionProblem&, JetHeads, JetHeads, const void*, void*, JetHeads, JetHeads, JetHeads, Queue) { return -1; }
}
