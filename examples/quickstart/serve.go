// SPDX-License-Identifier: Apache-2.0

package main

// invite prints what to try while the gateway stays up. view is nil if there is no live view.
func (s *screen) invite(l *lab, view *live) {
	url := l.url
	if view != nil {
		url = view.url
		s.printf("\n%s\n\n  %s\n", s.paint(bold, "The live view of cmd/gateway, which serves with the same P and D:"),
			view.page)
	}
	counters := "curl -s " + l.decode.URL() + `/metrics | grep -E ` +
		`'prompt_tokens_by_source_total|nixl_bytes_transferred_sum'`
	post := func(flags, path, body string) string {
		return "curl " + flags + " " + url + path + " -H 'Content-Type: application/json' -d '" + body + "'"
	}
	s.printf("\n%s\n", s.paint(bold, "The gateway stays up. In another terminal:"))
	for _, c := range []struct{ what, command string }{
		{"what D has counted so far", counters},
		{
			"a completion", post("-si", "/v1/completions",
				`{"model":"toy","prompt":"The tide tables for the coming week, please.","max_tokens":40}`),
		},
		{
			"a chat, streamed", post("-sN", "/v1/chat/completions",
				`{"model":"toy","messages":[{"role":"user","content":"When does the crane work again?"}],`+
					`"max_tokens":40,"stream":true}`),
		},
		{"again: external_kv_transfer and the bytes have risen, local_compute has not", counters},
	} {
		s.printf("\n  # %s\n  %s\n", c.what, c.command)
	}
	s.printf("\nA prompt that D has seen before stays in D's cache, and is not fetched again: change it.\n" +
		"Ctrl-C ends.\n")
}

func (s *screen) draining() { s.printf("\nDraining: what runs may end, nothing new begins.\n") }
