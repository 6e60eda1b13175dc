"""Pictures of a run: pages, charts, graphs, traces.

Reading order: html, charts, canvas, svg, device_chart, step_graph, graph_svg, perfetto.
"""
