// SPDX-License-Identifier: Apache-2.0

// Package dns is a discovery source of engines that have names: one name for each role, asked again whenever its
// answer's time to live ends.
//
// With a port given, a name stands for addresses (A and AAAA records), as that of a headless Kubernetes service does.
// Without one it stands for SRV records, which say the ports, and the addresses of their targets are looked up.
package dns
