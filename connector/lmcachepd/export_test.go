// SPDX-License-Identifier: Apache-2.0

package lmcachepd

// FailListener closes the listening socket as if it had died.
func (c *Connector) FailListener() { c.started().Fail() }
