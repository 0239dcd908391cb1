// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// noPage is an error: the HTTP status of an engine that has no such page.
type noPage struct {
	path   string
	status int
}

func (n noPage) Error() string { return fmt.Sprintf("GET %s answered %d", n.path, n.status) }

// send sends an engine a request, with a body of JSON where it has one. It returns responses of status 200, whose body
// the caller closes.
func send(ctx context.Context, client *http.Client, method, engine, path string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, engine+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		_ = resp.Body.Close()
		return nil, noPage{path, resp.StatusCode}
	}
	return resp, nil
}

// readJSON decodes what an engine answers.
func readJSON(ctx context.Context, client *http.Client, method, engine, path string, body []byte, into any) error {
	resp, err := send(ctx, client, method, engine, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if json.NewDecoder(io.LimitReader(resp.Body, maxPage)).Decode(into) != nil {
		return fmt.Errorf("%s %s: the response is not what it should be", method, path)
	}
	return nil
}

// sleep waits, and reports whether ctx has not ended meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
