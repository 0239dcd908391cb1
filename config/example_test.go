// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/pdkit/pdkit/config"
)

func ExampleDecode() {
	settings := struct {
		Store string          `json:"store"`
		Keep  config.Duration `json:"keep"`
	}{Keep: config.Duration(time.Minute)} // the default
	fmt.Println(config.Decode(json.RawMessage(`{"store":"north"}`), &settings), settings.Store, settings.Keep)
	fmt.Println(config.Decode(json.RawMessage(`{"stoer":"north","keep":20}`), &settings))
	// Output:
	// <nil> north 1m0s
	// stoer: unknown field; did you mean store?
	// keep: is a number without a unit; write a number and a unit, like "30s" or "1m30s"
}
