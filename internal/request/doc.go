// SPDX-License-Identifier: Apache-2.0

// Package request reads clients' requests: where each API keeps what a leg must know or change, which members two
// engines cannot serve together, which ones an engine would refuse, and which ones no client may send. Nothing here
// knows a connector: packages connector and connector/check give it to those who do.
package request
