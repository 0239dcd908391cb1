// SPDX-License-Identifier: Apache-2.0

package passthrough

// Served is the list of what passes.
var Served = served
