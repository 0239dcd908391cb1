// SPDX-License-Identifier: Apache-2.0

// Package archtest checks which packages of pdkit may import each other, which modules from outside each may import,
// and what library code must not do. Its tests read the graph of imports (go list -deps -json) and the source. A
// failure says which rule is broken, by which chain of imports, and why the rule exists.
//
// The rules are data, in rules.go and source.go. If you have a good reason to change a rule, change it there, and its
// reason with it.
package archtest
