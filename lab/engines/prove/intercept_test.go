// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func newTestIntercept(t *testing.T, engine http.HandlerFunc) *intercept {
	t.Helper()
	server := httptest.NewServer(engine)
	t.Cleanup(server.Close)
	i, err := newIntercept(server.URL)
	require.NoError(t, err)
	t.Cleanup(i.close)
	return i
}

func postTo(t *testing.T, url string) (string, error) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("question"))
	require.NoError(t, err)
	response, err := plain.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	return string(content), err
}

func TestHookAfterAnswerRunsOnceBeforeTheGatewaySeesIt(t *testing.T) {
	engineAnswered := false
	i := newTestIntercept(t, func(w http.ResponseWriter, _ *http.Request) {
		engineAnswered = true
		_, _ = io.WriteString(w, "response")
	})
	runs := 0
	i.afterAnswer(func() {
		runs++
		assert.True(t, engineAnswered, "the hook is between the legs, not before them")
	})
	for range 2 {
		text, err := postTo(t, i.url)
		require.NoError(t, err)
		assert.Equal(t, "response", text)
	}
	assert.Equal(t, 1, runs, "the hook is for one request")
}

func TestHookBeforeRequestCanKeepItFromTheEngine(t *testing.T) {
	requests := 0
	i := newTestIntercept(t, func(http.ResponseWriter, *http.Request) { requests++ })
	i.beforeRequest(func() error { return errors.New("drop it") })
	_, err := postTo(t, i.url)
	require.Error(t, err, "the gateway must see a broken connection, not a response")
	assert.Zero(t, requests)
	_, err = postTo(t, i.url)
	require.NoError(t, err)
	assert.Equal(t, 1, requests)
}

func TestShutDoorLetsNobodyInUntilItOpens(t *testing.T) {
	i := newTestIntercept(t, func(http.ResponseWriter, *http.Request) {})
	require.NoError(t, i.door.shut())
	_, err := net.DialTimeout("tcp4", i.door.Addr().String(), 300*time.Millisecond)
	var timeout net.Error
	require.ErrorAs(t, err, &timeout)
	require.True(t, timeout.Timeout())
	i.door.open()
	_, err = postTo(t, i.url)
	require.NoError(t, err)
}
