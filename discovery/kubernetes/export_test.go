// SPDX-License-Identifier: Apache-2.0

package kubernetes

import "time"

// SetPatience sets how long a fault lasts before it is told, once there is a list.
func (s *Source) SetPatience(d time.Duration) { s.patience = d }
