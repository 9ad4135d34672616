"""HTTP: the server and its connections, requests on their way in, responses on their way out, and the routes."""
