// SPDX-License-Identifier: Apache-2.0

package play

import (
	"encoding/json"
	"errors"
	"strings"

	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
)

// Refuses wants each of the settings to be refused for one fault, at the path of the field that is wrong and with a
// remedy. Texts after "path … " must stand in the error, too, each after its own " … ".
func Refuses(t T, name string, wrong map[string]string) {
	t.Helper()
	for settings, want := range wrong {
		texts := strings.Split(want, " … ")
		_, err := connector.Open(config.Spec{Type: name, Config: json.RawMessage(settings)})
		faults := config.FieldErrors(err)
		if len(faults) != 1 || faults[0].Path != texts[0] || faults[0].Remedy == "" {
			t.Errorf("%.200s: want one fault at %s with a remedy, got: %v", settings, texts[0], err)
			continue
		}
		for _, text := range texts[1:] {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%.200s: want %q in the error, got: %v", settings, text, err)
			}
		}
	}
}

// Spoilt replaces one key of a good handoff by each of its wrong values; "-" removes the key. Each must be refused,
// with an error that names the key and holds none of the secrets. Wrong values have 4321 in them, which is one.
func Spoilt(t T, good string, wrong map[string][]string, use func(bad string) error, secrets ...string) {
	t.Helper()
	for key, values := range wrong {
		for _, value := range values {
			bad, err := sjson.Delete(good, key)
			if value != "-" {
				bad, err = sjson.SetRaw(good, key, value)
			}
			if err != nil {
				t.Fatal(err)
			}
			err = use(bad)
			if !errors.Is(err, connector.ErrNoTransfer) || !strings.Contains(err.Error(), key) {
				t.Errorf("%s=%s: want ErrNoTransfer with the key's name, got: %v", key, value, err)
				continue
			}
			for _, secret := range append(secrets, "4321") {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("%s=%s: the error holds %s: %v", key, value, secret, err)
				}
			}
		}
	}
}
