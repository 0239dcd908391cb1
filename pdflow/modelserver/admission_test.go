// SPDX-License-Identifier: Apache-2.0

package modelserver_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

func TestAdmission(t *testing.T) {
	for admission, want := range map[string]*admit.Options{
		`{}`:                  nil,
		`{"mode":"off"}`:      nil,
		`{"mode":false}`:      nil,
		`{"mode":"adaptive"}`: {Adaptive: true},
		`{"mode":"fixed","inFlightPerPrefill":4,"inFlightPerDecode":8,"queue":9,"queueTimeout":"3s"}`: {PrefillLimit: 4,
			DecodeLimit: 8, Queue: 9, QueueTimeout: 3 * time.Second},
		`{"mode":"adaptive","inFlightPerPrefill":4,"queue":0}`: {Adaptive: true, PrefillLimit: 4, Queue: -1},
	} {
		ms := read(t, `{"model":"m","admission":`+admission+`}`)
		assert.Equal(t, want, ms.AdmitOptions(), admission)
	}
	for admission, fault := range map[string]string{
		`{"mode":"adaptiv"}`:                        "spec.admission.mode: is not a known mode; did you mean adaptive?",
		`{"mode":true}`:                             "spec.admission.mode: is not a known mode; ",
		`{"mode":"fixed"}`:                          "spec.admission: has no limit; ",
		`{"mode":"fixed","inFlightPerDecode":-1}`:   "spec.admission.inFlightPerDecode: is negative; ",
		`{"mode":"adaptive","queue":-1}`:            "spec.admission.queue: is negative; ",
		`{"mode":"adaptive","queueTimeout":"0s"}`:   "spec.admission.queueTimeout: is 0; ",
		`{"mode":"adaptive","priorityHeader":"X "}`: "spec.admission.priorityHeader: is not a header's name; ",
	} {
		_, err := modelserver.Read(object(`{"model":"m","admission":` + admission + `}`))
		require.Error(t, err, admission)
		assert.Contains(t, lines(err)[0], fault)
	}
	ms := read(t, `{"model":"m","admission":{"mode":"adaptive","priorityHeader":"x-rank"}}`)
	assert.Equal(t, 7, ms.AdmitOptions().Priority(&pdflow.PickInput{Header: http.Header{"X-Rank": {"7"}}}))
	ms = read(t, `{"model":"m","admission":{"queue":3}}`)
	require.NotEmpty(t, ms.Notes)
	assert.Contains(t, ms.Notes[len(ms.Notes)-1].Error(), "spec.admission: its mode is off")
}
