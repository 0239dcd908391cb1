// SPDX-License-Identifier: Apache-2.0

// Package dns is a discovery source for engines that have DNS names. Each role has one name. The source asks for it
// again whenever the answer's time to live ends.
//
// With a port the source asks for the name's addresses (A and AAAA records), as of a headless Kubernetes service.
// Without a port it asks for SRV records, which have ports, and for the addresses of their targets.
package dns
