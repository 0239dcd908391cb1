// SPDX-License-Identifier: Apache-2.0

// Package archtest holds the directions in which the packages of pdkit depend on each other, what they take from
// outside, and what library code never does. Its tests read the real graph (go list -deps -json) and the real source;
// each failure says which rule is broken, by which chain of imports, and why the rule is there.
//
// The rules are data, in rules.go. Whoever has a good reason to change one changes it there, with the reason.
package archtest
