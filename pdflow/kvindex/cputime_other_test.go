// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package kvindex

import "time"

// threadTime is the time for which this thread has had a processor, as far as can be told.
func threadTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
