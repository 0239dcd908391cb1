// SPDX-License-Identifier: Apache-2.0

// Package intake has the rules for the bodies of clients' requests that handlers share.
package intake

import (
	"errors"
	"mime"
	"net/http"
	"strings"
	"time"
)

// CheckHeader returns what is wrong with the header of a request whose body must be JSON, "" if nothing is. Bodies in
// another form or encoding could not be looked through for transfer members.
func CheckHeader(h http.Header) string {
	if types := h["Content-Type"]; len(types) != 1 || !isJSON(types[0]) {
		return "Content-Type must be application/json"
	}
	for _, encoding := range h["Content-Encoding"] {
		if encoding != "" && !strings.EqualFold(encoding, "identity") {
			return "Content-Encoding must be identity"
		}
	}
	return ""
}

func isJSON(contentType string) bool {
	if contentType == "application/json" {
		return true
	}
	media, _, err := mime.ParseMediaType(contentType)
	return media == "application/json" && (err == nil || errors.Is(err, mime.ErrInvalidMediaParameter))
}

// leftover is for how long net/http may read what is left of the body of a request that has failed.
const leftover = time.Second

// Closing makes net/http close the connection after a response that leaves some of the body unread. net/http reads on
// for a while, so that the client sees the response. Without a deadline a slow client would hold the connection for
// ever.
func Closing(w http.ResponseWriter) {
	w.Header().Set("Connection", "close")
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(leftover))
}
