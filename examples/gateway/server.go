// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
)

// serve serves until a signal asks it to end.
func serve(context.Context, *config, string, *slog.Logger, <-chan os.Signal) error {
	return errors.New("serving comes with the flow")
}
