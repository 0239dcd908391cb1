// SPDX-License-Identifier: Apache-2.0

// Package attest finds the engine, or the pair of engines, that corrupts KV on its way from prefill to decode.
//
// Such a fault is silent: every status is 200 and every counter is right, but decode reads KV that is not the prompt's,
// and the text is wrong. A [Prober] sends synthetic probes beside live traffic. Each goes through one pair, P and D,
// with a prompt that no engine has seen, and its response is compared with that of an engine that did not take part. An
// [Estimator] chooses the pairs, and says from the results which P, which D or which pair is at fault. A [Quarantine]
// keeps requests away from it, as long as other engines of its role are there.
//
// docs/reliability/attestation.md has how many probes that takes.
package attest
