"""A stand-in for PyTorch's index of CPU builds, which tests reach as a proxy for its address."""

import contextlib
import http.server
import ssl
import subprocess
import threading

HOST = "download.pytorch.org"


@contextlib.contextmanager
def serve(folder, versions):
    """Serve an index with wheels of these versions; yield the variables by which uv finds it.

    folder: for the certificate. versions: a dictionary from a package's name to its version.
    """
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test",
                    "-addext", f"subjectAltName=DNS:{HOST}",
                    "-addext", "basicConstraints=critical,CA:FALSE",
                    "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_CONNECT(self):
            self.send_response(200)
            self.end_headers()
            self.connection = context.wrap_socket(self.connection, server_side=True)
            self.rfile = self.connection.makefile("rb")
            self.wfile = self.connection.makefile("wb", 0)
            self.close_connection = False

        def do_GET(self):
            package = self.path.removeprefix("/whl/cpu/").strip("/")
            wheel = f"{package}-{versions.get(package)}+cpu-py3-none-any.whl"
            body = f'<a href="{wheel.replace("+", "%2B")}">{wheel}</a>'.encode()
            self.send_response(200 if package in versions else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"HTTPS_PROXY": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "",
               "SSL_CERT_FILE": str(certificate)}
        server.shutdown()
